"""Report about one or several runs: report.html, made from the files of their run directories (`async-flowrl report`).

document.py reads the files into one JSON-able document; page.py puts the document into an HTML page that draws it.
"""
