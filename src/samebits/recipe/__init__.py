"""The recipe: one arithmetic task, one small model, one configuration for both arms, and what launches them."""
