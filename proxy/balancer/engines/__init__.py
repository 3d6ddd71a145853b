"""What is known of engines: their software, versions and sizes, what these can do, and the keys they are asked with."""
