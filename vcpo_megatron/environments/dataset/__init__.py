"""The environment "dataset": prompts and reference answers from files, and rewards by name."""
