"""What ties the ops to other software. Nothing here is imported, or registered anywhere, unless it is asked for."""
