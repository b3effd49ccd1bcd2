"""Published models: their checkpoints into our parameters, and our runs into their format."""
