"""A configuration with held-out terms, for tests of evaluations."""

from async_flowrl.config.schema import Config, EvaluateConfig, HeldOutConfig, RewardConfig, RewardTerm, SaveConfig


def config_of(on_hacking: str = "warn", best: str | None = None) -> Config:
    return Config(
        total_steps=40,
        reward=RewardConfig(terms={"size": RewardTerm(name="jpeg_compressibility")}),
        evaluate=EvaluateConfig(
            every=10,
            on_hacking=on_hacking,
            reward=HeldOutConfig(terms={"ocr": RewardTerm(), "blue": RewardTerm(weight=0)}),
        ),
        save=SaveConfig(best=best),
    )
