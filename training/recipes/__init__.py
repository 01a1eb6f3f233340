"""What each recipe trains: a loss over the batches of a loop that does not know it."""
