"""Training on what the policy writes itself: where answers come from, and what is made of them."""
