"""Published and simple policies, one file each."""
