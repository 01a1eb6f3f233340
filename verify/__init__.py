"""How we know: the verifier of bridges and models, its levels, and the verdict it gives."""
