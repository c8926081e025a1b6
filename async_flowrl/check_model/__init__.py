"""async-flowrl check-model NAME_OR_PATH: a model family against diffusers' own pipeline, step by step.

A family that is wrong trains without complaint; only the images of whoever uses the LoRA in the stock pipeline show it.
"""
