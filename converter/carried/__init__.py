"""What a drafter may carry of its target: embeddings, head, a head of fewer tokens."""
