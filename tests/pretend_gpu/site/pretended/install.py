"""Installation of the pretended device: imported right after torch, it replaces torch.cuda and NCCL in this process."""

from pretended import cuda, nccl, nondeterministic, process_group, report

for part in (cuda, nccl, process_group, nondeterministic, report):
    part.install()
