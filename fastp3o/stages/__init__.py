"""The scripts' stages, from a configuration to a finished model: SFT, reward model, preferences, online, generate."""
