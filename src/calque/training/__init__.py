"""Recipes and the one loop that trains them."""
