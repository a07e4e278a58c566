"""A report as one HTML file: data, a template (Jinja2) and the assets that it embeds."""
