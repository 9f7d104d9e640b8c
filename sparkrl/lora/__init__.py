"""Low-rank adapters: expert layers, target selection, PEFT's format."""
