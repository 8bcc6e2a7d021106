"""Tables, figures and words → one page that needs nothing outside itself."""
