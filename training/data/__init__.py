"""What enters the loss, exactly: tokens and masks, sources, mixing, packing, and a state that resumes to the token."""
