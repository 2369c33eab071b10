"""What hooks onto single modules, and copies what their calls show."""
