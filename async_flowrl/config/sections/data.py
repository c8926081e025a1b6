"""The section `data` of the configuration: prompts and their curriculum."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import MAX_SEED, NOTHING, setting


@dataclass
class CurriculumConfig:
    """Sets prompts aside for a while if all images of a group get the same reward, because they teach nothing."""

    after: int | None = setting(None, at_least=1)
    """Groups of images in succession, of one prompt and without any spread of rewards, after which the prompt is set
    aside; null = never. Only groups of steps more than max_staleness steps ago count; these are certainly trained."""
    skip_epochs: int = setting(1, at_least=1)
    """Passes over the prompts without a prompt that is set aside. Then it comes at least once, and stays if its rewards
    differ."""


@dataclass
class DataConfig:
    """The prompts."""

    train: str = "prompts/two_prompts.txt"
    """Training prompts: a txt, jsonl or parquet file, or a folder with a train split (see docs/data.md). Relative paths
    are searched in the working directory, then among the files of this package."""
    evaluation: str | None = setting(None, changes=NOTHING)
    """Evaluation prompts: a file as in data.train, or a folder with a test split. null = as data.held_out says; then
    the held-out prompts are not trained. A resumed run must have the same training prompts."""
    prompt_key: str = "prompt"
    """Column of a jsonl or parquet file that holds the prompt."""
    weight_key: str | None = None
    """Column with a weight of at least 0: on average a prompt is drawn in proportion to its weight, in each epoch that
    number rounded up or down. An epoch has as many draws as there are prompts. null = each prompt once per epoch."""
    held_out: float | None = setting(None, at_least=0, below=1)
    """Share of the prompts of data.train that are evaluated instead of trained; equal texts stay together. null = if
    data.evaluation=null and there are at least 64 different prompts, 16 of them, but at most an eighth; 0 = none."""
    held_out_seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed that selects the held-out prompts."""
    shuffle: bool = True
    """true: a new order of the prompts in every epoch, drawn from the seed. false: the order of the file."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
