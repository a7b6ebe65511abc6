// The chosen colours, before anything is drawn. A browser without storage has the system's.
try {
  const theme = localStorage.getItem("dsv4.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  /* the system's colours */
}
