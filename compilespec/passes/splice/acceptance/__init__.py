"""How drafts are judged: the rules, one file each, their registry, and their options."""
