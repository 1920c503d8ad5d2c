"""What files say about themselves, whether they fit each other, and putting old ones right."""
