"""The report about one or several runs: what their files say as one document, and the page that shows it."""
