"""Records of files of any size, shuffled, mixed, and resumed at any position."""
