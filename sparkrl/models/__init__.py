"""Model families and what is common to them."""
