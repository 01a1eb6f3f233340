"""Who uses the models: data, losses, recipes, parallelism and reinforcement learning, blind to the family."""
