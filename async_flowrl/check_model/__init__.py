"""Comparison of a model family (the code for one kind of model) with diffusers' own "stock" pipeline, step by step.

The command is `async-flowrl check-model NAME_OR_PATH`. Training with a wrong family raises no error; the fault would
only appear when somebody uses the LoRA in diffusers.
"""
