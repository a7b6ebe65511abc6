"""Is this machine, this build and this checkpoint right? Each module examines one of them."""
