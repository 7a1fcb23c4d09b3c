"""What training needs of the engine and of the command line: prompts, and the target's own answers to them."""
