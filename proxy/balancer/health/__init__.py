"""Who is up, who is ejected and tried again, and whose fault a failure was."""
