"""Tables, explanations and pages that present plans."""
