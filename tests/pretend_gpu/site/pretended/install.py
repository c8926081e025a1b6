"""Installation of the pretended device: imported right after torch, it replaces torch.cuda and NCCL in this process."""

from pretended import cuda, gang, nccl, nondeterministic, report

for part in (cuda, nccl, gang, nondeterministic, report):
    part.install()
