"""What SFT, the reward model and preference optimization share."""
