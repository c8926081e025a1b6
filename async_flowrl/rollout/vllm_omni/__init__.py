"""Rollout engine `vllm_omni`, which generates with vllm-omni; modules that import vllm load when the engine starts."""
