// A cell of numbers, such as +0.0016 (−0.0008 to +0.0044), does not break across lines; a table too wide for it scrolls.
for (const cell of document.querySelectorAll("td")) {
  if (/^[\d\s.,;:+±×%()−-]+$/.test(cell.textContent.replaceAll(" to ", ""))) cell.style.whiteSpace = "nowrap";
}
