"""What a training step needs on a slice of TPUs: compiled here, without the TPUs."""
