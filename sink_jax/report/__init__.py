"""Results side by side: tables, sentences, figures, one page."""
