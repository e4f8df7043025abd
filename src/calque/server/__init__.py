"""The server of `calque serve`: a JSON API and a page over what Calque computes."""
