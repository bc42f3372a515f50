"""What several scripts of bench/ share."""
