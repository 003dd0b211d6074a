"""What R3 is about: captured routes, their replay in the routers, and the account of every row."""
