"""Head-to-head win rates of two checkpoints, by a reward and by a pairwise judge."""
