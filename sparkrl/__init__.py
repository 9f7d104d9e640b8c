"""sparkrl: GRPO for large sparse models, on Ray, vLLM and verl."""

__version__ = "0.1.0"
