"""Imported right after torch: the pretended device takes torch.cuda's and NCCL's place in this process."""

from pretended import cuda, gang, nccl, nondeterministic, report

for part in (cuda, nccl, gang, nondeterministic, report):
    part.install()
