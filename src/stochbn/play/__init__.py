"""A page to draw on: what 256 networks say of a digit, or of a letter that none of them knows (extra `[play]`)."""
