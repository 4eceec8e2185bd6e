"""How drafts are judged: the rules, a file each, their registry and the options that name them."""
