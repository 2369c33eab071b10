"""What a session watches: one file for each thing that is measured."""
