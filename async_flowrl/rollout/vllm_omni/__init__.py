"""The vllm-omni rollout engine. Everything that imports vllm is imported only when the engine starts."""
