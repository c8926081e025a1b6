// Typesets what pymdownx.arithmatex has marked: \(inline\) and \[displayed\] formulas.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
