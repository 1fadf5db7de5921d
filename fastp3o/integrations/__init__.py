"""P3O in other trainers, one module for each; it needs the trainer, and nothing else of fastp3o does."""
