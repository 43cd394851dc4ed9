"""How ranks come to be, and stay well: the notebook's side of the lab."""
