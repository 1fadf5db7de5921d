"""What P3O is compared with: PPO and online DPO, in the same loop on the same rollouts; only the update differs."""
