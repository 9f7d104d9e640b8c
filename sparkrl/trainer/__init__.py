"""The trainer: Ray actors around verl's FSDP2 engine, adapter-only training with replayed routes."""
