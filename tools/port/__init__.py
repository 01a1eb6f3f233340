"""`bestiary port`: a new architecture from its Hugging Face class to an accepted bridge."""
